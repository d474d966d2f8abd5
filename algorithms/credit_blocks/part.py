from agentrl.base.parts import Part

PART = Part(
    name="credit blocks",
    summary="Credit of calls by values, potentials and running means, for presets and your own.",
)
