"""Settings: the run file as typed, validated values.

`schema` and `infrastructure` define the tables, `validate` checks combinations of settings,
`run_file` reads the file; other packages import from here.
"""

from typing import TYPE_CHECKING

from agentrl.base.late import late
from agentrl.config.agents import AgentConfig as AgentConfig
from agentrl.config.agents import RetriesConfig as RetriesConfig
from agentrl.config.agents import RoleRule as RoleRule
from agentrl.config.agents import UpstreamConfig as UpstreamConfig
from agentrl.config.base import Count as Count
from agentrl.config.base import Natural as Natural
from agentrl.config.base import Positive as Positive
from agentrl.config.base import Section as Section
from agentrl.config.infrastructure import RunnerConfig as RunnerConfig
from agentrl.config.infrastructure import TorchLearnerConfig as TorchLearnerConfig

if TYPE_CHECKING:
    from agentrl.config.run_file import differences as differences
    from agentrl.config.run_file import from_store as from_store
    from agentrl.config.run_file import load as load
    from agentrl.config.run_file import resolve as resolve
    from agentrl.config.run_file import store_in as store_in
    from agentrl.config.run_file import store_of as store_of
    from agentrl.config.run_file import to_toml as to_toml
    from agentrl.config.schema import AlgorithmConfig as AlgorithmConfig
    from agentrl.config.schema import LoraConfig as LoraConfig
    from agentrl.config.schema import PolicyConfig as PolicyConfig
    from agentrl.config.schema import RunConfig as RunConfig

# Imported late: `schema` imports the tables of parts, and these the modules above.
LATE = {
    "run_file": "differences from_store load resolve store_in store_of to_toml",
    "schema": "AlgorithmConfig LoraConfig PolicyConfig RunConfig UpstreamConfig",
}
__getattr__ = late(__name__, LATE)
