"""What sessions are worth: signals, and the outcome that follows from them."""
