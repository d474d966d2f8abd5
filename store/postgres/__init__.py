"""Store in a PostgreSQL database."""
