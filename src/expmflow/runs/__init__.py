"""What a finished run can do, wherever its folder is: open, evaluate, sample, score, export."""
