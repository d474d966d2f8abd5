"""1 for one guess, less for every further guess, 0 if the number was not found."""


def verify(result: int) -> float:
    return 1 / result if result else 0.0
