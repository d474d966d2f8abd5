"""1 for the first guess, less for every further one, 0 if the number was not found."""


def verify(result: int) -> float:
    return 1 / result if result else 0.0
