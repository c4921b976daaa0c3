"""One picture of a run: its summary, tables and curves, for the page that is served and the page that is one file."""
