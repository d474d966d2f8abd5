"""Building blocks of credit that families of presets share."""
