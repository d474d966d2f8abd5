"""Models as files: importing, exporting and serving them. See README.md."""
