"""Settings: the run file as typed, validated values.

`schema` and `infrastructure` define the tables, `validate` checks combinations of settings, `load`
reads the file; other packages import from here.
"""

from agentrl.config.agents import AgentConfig as AgentConfig
from agentrl.config.agents import RetriesConfig as RetriesConfig
from agentrl.config.agents import RoleRule as RoleRule
from agentrl.config.base import Count as Count
from agentrl.config.base import Natural as Natural
from agentrl.config.base import Positive as Positive
from agentrl.config.base import Section as Section
from agentrl.config.infrastructure import PoolConfig as PoolConfig
from agentrl.config.infrastructure import PoolRunnerConfig as PoolRunnerConfig
from agentrl.config.infrastructure import RunnerConfig as RunnerConfig
from agentrl.config.infrastructure import TorchLearnerConfig as TorchLearnerConfig
from agentrl.config.load import differences as differences
from agentrl.config.load import from_store as from_store
from agentrl.config.load import load as load
from agentrl.config.load import resolve as resolve
from agentrl.config.load import store_in as store_in
from agentrl.config.load import store_of as store_of
from agentrl.config.load import to_toml as to_toml
from agentrl.config.schema import AlgorithmConfig as AlgorithmConfig
from agentrl.config.schema import LoraConfig as LoraConfig
from agentrl.config.schema import PolicyConfig as PolicyConfig
from agentrl.config.schema import RunConfig as RunConfig
from agentrl.config.schema import UpstreamConfig as UpstreamConfig
