"""The report: reads runs and records of evaluations (`read`), draws figures, and puts them on one HTML page."""
