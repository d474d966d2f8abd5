from agentrl.base.parts import Part

PART = Part(
    name="asgi",
    summary="HTTP servers of the view and of a served store, by uvicorn.",
)
