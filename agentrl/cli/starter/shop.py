"""The tool of the agent, and the products that it knows (products.csv)."""

import csv
from pathlib import Path

COLUMNS = ("price", "shelf", "supplier")
with Path(__file__).with_name("products.csv").open(encoding="utf-8") as file:
    PRODUCTS = {row["product"]: row for row in csv.DictReader(file)}


def look_up(product: str, column: str) -> str:
    """Look up the price, shelf or supplier of a product."""
    return PRODUCTS.get(product, {}).get(column, "not found")


# The tool as the OpenAI API describes it.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": look_up.__doc__,
            "parameters": {
                "type": "object",
                "properties": {"product": {"type": "string"}, "column": {"type": "string"}},
                "required": ["product", "column"],
            },
        },
    }
]
