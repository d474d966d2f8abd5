"""Questions about products. What the held-out ones ask about is in no training task."""

from shop import COLUMNS, PRODUCTS

HELDOUT_PRODUCTS = 40


def questions(product: str) -> list[dict[str, str]]:
    return [
        {
            "id": f"{product}/{column}",
            "input": f"What is the {column} of the {product}?",  # all that the agent sees
            "answer": PRODUCTS[product][column],  # for the verifier
            "product": product,
            "column": column,
        }
        for column in COLUMNS
    ]


heldout = [task for product in list(PRODUCTS)[:HELDOUT_PRODUCTS] for task in questions(product)]
train = [task for product in list(PRODUCTS)[HELDOUT_PRODUCTS:] for task in questions(product)]
