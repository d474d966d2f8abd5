"""Commands that help to write a run file."""
