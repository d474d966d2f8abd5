from agentrl.base.parts import Part

PART = Part(
    name="postgres",
    summary="Stores in a PostgreSQL database, for several machines and teams.",
    stores=dict.fromkeys(("postgresql", "postgres"), "agentrl.store.postgres.backend:POSTGRES"),
)
