-- One index finds the calls of an attempt. The two that did it before had digests too, which no
-- query looks for any more, and cost every call that is stored or pruned.

create index transitions_by_attempt on transitions (attempt_id);
drop index transitions_by_tokens;
drop index transitions_by_chat;
