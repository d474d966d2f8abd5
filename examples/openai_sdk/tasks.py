"""Numbers to guess; every fifth is held out."""

MAX_NUMBER = 30
GAMES = [
    {"id": str(secret), "input": {"secret": secret, "highest": MAX_NUMBER}}
    for secret in range(1, MAX_NUMBER + 1)
]
train = [game for i, game in enumerate(GAMES) if i % 5]
heldout = GAMES[::5]
