-- name: group_of_purpose
and purpose = :of_purpose

-- name: with_text
and (
    strpos(r.error_message, :words) > 0
    or exists (
        select 1 from transitions t
        where t.attempt_id = r.attempt_id and t.late = 0
          and (strpos(t.answer, :text) > 0 or strpos(t.messages, :text) > 0)
    )
)
