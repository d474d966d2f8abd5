-- Policy versions that sampled a call's tokens, if the weights were updated during the call.

alter table transitions add column spans text;  -- JSON [[first token, version], ...]; null: one
