"""The functions that score: their sources, arguments and callees."""
