"""Numbers to guess; every fifth is held out."""

HIGHEST = 30
GAMES = [
    {"id": str(secret), "input": {"secret": secret, "highest": HIGHEST}}
    for secret in range(1, HIGHEST + 1)
]
train = [game for i, game in enumerate(GAMES) if i % 5]
heldout = GAMES[::5]
