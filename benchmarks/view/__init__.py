"""How fast the page of a run answers over a long log."""
