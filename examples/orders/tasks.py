"""Orders: 16 for the search, 12 for validation, 60 held out."""

from world import make

train = make(16, "train0") + make(12, "val0")
heldout = make(60, "test")
