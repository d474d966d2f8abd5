"""Language models: loading, adapters, packing, attention, chat templates."""
