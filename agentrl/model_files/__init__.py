"""Models as files: those of other tools made trainable, and trained ones made for other tools."""
