from agentrl.base.parts import Part

HERE = "agentrl.store.http"

PART = Part(
    name="http-store",
    summary="A store that other machines use over HTTP, with keys for runners and readers.",
    uses=("asgi",),
    commands={"store serve": f"{HERE}.command:serve"},
    stores={"http": f"{HERE}.backend:HTTP", "https": f"{HERE}.backend:HTTPS"},
)
