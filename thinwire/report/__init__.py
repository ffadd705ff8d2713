"""Records in, one self-contained HTML file out. Imports no torch."""
