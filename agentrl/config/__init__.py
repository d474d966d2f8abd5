"""Settings: the run file as typed, validated values.

`schema` has the run file as a class, whose tables are in `agents`, `learning`, `rewards`,
`infrastructure` and `live`; `run_file` reads and writes it, `validate` and `presets` check
combinations of settings, `policies` says what each of several policies makes of them.
"""

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
from agentrl.config.learning import AlgorithmConfig as AlgorithmConfig
from agentrl.config.learning import LoraConfig as LoraConfig
from agentrl.config.learning import PolicyConfig as PolicyConfig
from agentrl.config.run_file import differences as differences
from agentrl.config.run_file import from_store as from_store
from agentrl.config.run_file import load as load
from agentrl.config.run_file import resolve as resolve
from agentrl.config.run_file import store_in as store_in
from agentrl.config.run_file import store_of as store_of
from agentrl.config.run_file import to_toml as to_toml
from agentrl.config.schema import RunConfig as RunConfig
