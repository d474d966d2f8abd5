from agentrl.base.parts import Part

PART = Part(
    name="serve",
    summary="Serve a trained model behind all model APIs, with keys and TLS.",
    uses=("evaluation", "model files"),
    commands={"serve": "agentrl.serve.command:serve"},
)
