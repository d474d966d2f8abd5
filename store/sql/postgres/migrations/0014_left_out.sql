-- Options of a model call without effect, such as fields for its API's own server only.

alter table transitions add column left_out text;  -- a JSON list; null: none
