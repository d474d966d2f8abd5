-- name: attempts
select id, run_id, state, lease_until from attempts
where id in (select value from json_each(:attempts));

-- name: known
select attempt_id, late from transitions where id = ?;

-- name: tree
select id, attempt_id, late, seq, size, digest, chat_size, chat_digest, answer_digest
from transitions
where attempt_id in (select value from json_each(:attempts))
   or id in (select value from json_each(:ids));

-- name: check_known
-- An error, for which a query has few ways, where an attempt of `known`, a list of [id, number of
-- calls], has ended or has other calls: the transaction is run again, by what it finds.
select json(case
    when (select count(*) from transitions where attempt_id = json_extract(value, '$[0]'))
            = json_extract(value, '$[1]')
        and (
            select state = 'running' and lease_until > :now
            from attempts where id = json_extract(value, '$[0]')
        )
    then 'true' else 'changed'
end)
from json_each(:known);

-- name: add_payload
insert into payloads (hash, body) values (?, ?) on conflict (hash) do nothing;

-- name: add_transition
insert into transitions (
    id, attempt_id, position, late, parent, size, digest,
    chat_parent, chat_shared, chat_size, chat_digest, answer_digest,
    role, policy, version, finish, exact, span_id, started_at, seconds, sampling, tools,
    prompt, completion, logprobs, messages, answer, repeats, left_out, spans, images
) values (
    :id, :attempt, :index, :late,
    coalesce(:parent, (select seq from transitions where id = :parent_id)), :size, :digest,
    coalesce(:chat_parent, (select seq from transitions where id = :chat_parent_id)), :chat_shared, :chat_size, :chat_digest, :answer_digest,
    :role, :policy, :version, :finish, :exact, :span, :started, :seconds, :sampling, :tools,
    :prompt, :completion, :logprobs, :messages, :answer, :repeats, :left_out, :spans, :images
);

-- name: add_span
insert into spans (
    attempt_id, id, parent_id, name, kind, started_at, ended_at, ok, late, attributes
) values (
    :attempt, :id, :parent, :name, :kind, :start, :end, :ok, :late, :attributes
)
on conflict (attempt_id, id) do nothing;

-- name: add_reward
insert into rewards (attempt_id, late, position, scope, target, name, value, source, step, note)
values (:attempt, :late, :position, :scope, :target, :name, :value, :source, :step, :note)
on conflict (attempt_id, late, position) do nothing;

-- name: give_reward
insert into rewards (attempt_id, late, position, scope, target, name, value, source, step, note)
values (:attempt, :late, :position, :scope, :target, :name, :value, :source, :step, :note)
on conflict (attempt_id, late, position) do update set value = excluded.value, note = excluded.note;

-- name: rollout
select r.*, case when g.state = 'trained' then g.trained_step end as trained_step
from rollouts r join groups g on g.id = r.group_id
where r.id = ?;

-- name: rollouts
select r.*, case when g.state = 'trained' then g.trained_step end as trained_step
from rollouts r join groups g on g.id = r.group_id
where r.run_id = :run

-- name: rollouts_purpose
and r.purpose = :purpose

-- name: rollouts_step
and r.step = :step

-- name: rollouts_group
and r.group_id = :group

-- name: rollouts_state
and r.state = :state

-- name: rollouts_unsuccessful
and r.state <> 'succeeded'

-- name: rollouts_trained
and g.run_id = :run and g.state = 'trained' and g.trained_step = :trained

-- The purposes are all that there are: an index begins with them.
-- name: rollouts_group_state
and g.run_id = :run and g.purpose in ('train', 'eval') and g.state = :group_state

-- name: rollouts_after
and (r.group_id, r.position, r.seq) > (
    select a.group_id, a.position, a.seq from rollouts a where a.id = :after
)

-- name: rollouts_sorted
order by r.group_id, r.position, r.seq

-- The plus keeps SQLite from reading the whole run in this order instead of sorting a few rows.
-- name: rollouts_few_sorted
order by +r.group_id, r.position, r.seq

-- name: rollouts_limit
limit :limit

-- name: rewards
select attempt_id, scope, target, name, value, source, note from rewards
where attempt_id in (select value from json_each(:attempts)) and late = :late
order by attempt_id, position;

-- name: transitions
select t.*, p.body as tools_body
from transitions t left join payloads p on p.hash = t.tools
where t.attempt_id in (select value from json_each(?))
order by t.seq;

-- name: outline
select
    t.seq, t.id, t.role, t.policy, t.version, t.spans, t.started_at, t.seconds, t.completion,
    t.messages, t.chat_parent, t.chat_shared
from rollouts r join transitions t on t.attempt_id = r.attempt_id
where r.id = ? and t.late = 0
order by t.position, t.seq;

-- name: spans
select * from spans where attempt_id = ? order by started_at, rowid;

-- name: credits
select t.id, c.*
from rollouts r
join transitions t on t.attempt_id = r.attempt_id
join credits c on c.transition = t.seq
where r.id = ?
order by t.position, c.policy;
