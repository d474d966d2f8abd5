-- Documents: values that parts keep with a run. The candidates and reflections of prompt searches
-- become documents of these kinds.

create table documents (
    seq integer primary key,            -- order of arrival
    run_id text not null references runs (id),
    kind text not null,
    key text not null,
    value text not null,                -- JSON
    unique (run_id, kind, key)
);

insert into documents (run_id, kind, key, value)
select run_id, 'candidate', id, json_object(
    'id', id, 'run', run_id, 'step', step, 'parents', json(parents), 'state', state,
    'texts', json(texts), 'reflection', reflection
)
from candidates order by seq;

insert into documents (run_id, kind, key, value)
select run_id, 'reflection', id, json_object(
    'id', id, 'run', run_id, 'step', step, 'question', question, 'answer', answer,
    'prompt_tokens', prompt_tokens, 'completion_tokens', completion_tokens, 'seconds', seconds
)
from reflections order by seq;

drop table candidates;
drop table reflections;
