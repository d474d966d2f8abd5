-- What the agent of a rollout did that is still to be scored, as JSON: whoever claims it next only
-- scores it. Null: its agent is still to run.

alter table rollouts add column ran text;
