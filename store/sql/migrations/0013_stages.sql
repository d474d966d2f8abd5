-- The agent's unscored run as JSON: the next claim only scores it. Null: the agent has yet to run.

alter table rollouts add column ran text;
