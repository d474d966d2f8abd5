"""Tasks and data sets in the formats of other projects: parquet, CSV, JSON and the hub."""
