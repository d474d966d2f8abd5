"""What the entry point names: the class itself is imported when it is asked for."""

from typing import TYPE_CHECKING

from agentrl.base.late import late

if TYPE_CHECKING:
    from agentrl.harbor.environment import Harbor as Harbor

__getattr__ = late("agentrl.harbor", {"environment": "Harbor"})
