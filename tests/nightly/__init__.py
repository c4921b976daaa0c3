"""`make nightly`: everything that `make test` does not run, area by area, with a record of when each one passed."""
