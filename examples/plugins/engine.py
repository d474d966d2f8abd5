"""A custom policy server, for `engine.kind = "engine.py:patient"`: the embedded one, which writes a
line whenever weights change."""

from agentrl.algorithms.engines.embedded.server import EmbeddedServer


class PatientServer(EmbeddedServer):
    async def publish(self, version, policy=None):
        await super().publish(version, policy)
        print(f"{policy or self.model} is served as version {version}", flush=True)


def patient(config, model, tokenizer, adapters, name):
    return PatientServer(model, tokenizer, adapters=adapters, name=name, max_batch=16)
