"""What a finished run can do, wherever it was carried: open, evaluate, weigh, score, ship."""
