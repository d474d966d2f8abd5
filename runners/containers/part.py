from agentrl.base.parts import Part

HERE = "agentrl.runners.containers"

PART = Part(
    name="containers",
    summary="Agents in containers: one of docker or podman, or a Kubernetes Job, for each rollout.",
    uses=("processes",),
    kinds={
        "runner.container": f"{HERE}.table:ContainerRunnerConfig",
        "runner.kubernetes": f"{HERE}.table:KubernetesRunnerConfig",
    },
    executors={
        "container": f"{HERE}.factory:container",
        "kubernetes": f"{HERE}.factory:kubernetes",
    },
)
