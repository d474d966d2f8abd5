"""The model APIs that agents speak, each translated into chat completions."""
