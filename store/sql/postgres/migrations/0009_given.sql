-- The training step that assigned a reward; a rewind of the step removes it.

alter table rewards add column step integer;  -- null: it came with the attempt

update rewards set step = (
    select g.trained_step
    from attempts a join rollouts r on r.id = a.rollout_id join groups g on g.id = r.group_id
    where a.id = rewards.attempt_id
)
where source in ('counterfactual', 'hindsight') or source like 'model:%';
