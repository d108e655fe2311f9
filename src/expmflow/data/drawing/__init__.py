"""Rows as pictures: panels of points and columns, graphs, grids of images."""
