"""What a rollout said, for people: its messages, its prompts, the text of its tokens."""
