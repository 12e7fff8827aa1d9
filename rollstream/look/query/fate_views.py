"""The SQL of `fates`, `bias` and `pass_at_k`: what became of trajectories, and a bias that a mean
reward hides: if dropped ones are mostly long answers or hard prompts, training sees short and easy
ones.
"""

from rollstream.storage.archive.run_rules import first_admission, valid

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
K_OF_PASS = tuple(2**power for power in range(11))

# `difficulty` (1 minus the mean reward) and `prompt_length` are means over the finished
# trajectories of a prompt's group, so an unfinished trajectory has them too if another one of its
# group finished.
FATES = f"""
WITH members AS (
    SELECT "group", wave, unnest(trajectories) AS trajectory FROM (
        SELECT * FROM admissions WHERE {valid("admitted/1")} QUALIFY {first_admission()})
), used AS (
    SELECT trajectory, min(step) AS step FROM trained GROUP BY trajectory
), kept AS (
    SELECT trajectory, sum(tokens) FILTER (masked IS NOT TRUE)::BIGINT AS tokens
    FROM spans WHERE step IS NOT NULL GROUP BY trajectory
), all_of AS (
    SELECT m.trajectory, m."group", m.wave, r.task, r.finish, r.tokens, r.reward, g.ended,
           g.needed < g.trajectories AS has_spares, u.step,
           coalesce(k.tokens, 0) AS tokens_trained, r.finish IN ('stop', 'length') AS finished
    FROM members m JOIN groups g USING ("group") LEFT JOIN rewards r USING (trajectory)
    LEFT JOIN used u USING (trajectory) LEFT JOIN kept k USING (trajectory)
)
SELECT trajectory, "group", wave, task,
       CASE WHEN step IS NOT NULL AND tokens_trained > 0 THEN 'trained'
            WHEN finish = 'dead' OR ended = 'dead' THEN 'dead'
            WHEN step IS NOT NULL OR ended = 'expired' THEN 'dropped'
            WHEN ended IN ('filtered', 'open') THEN ended
            WHEN has_spares THEN 'released'
            ELSE 'dropped' END AS fate,
       coalesce(finished, false) AS finished, finish, tokens, tokens_trained, reward, step,
       avg(tokens) FILTER (finished) OVER one_group AS prompt_length,
       1 - avg(reward) FILTER (finished) OVER one_group AS difficulty
FROM all_of WINDOW one_group AS (PARTITION BY "group")
"""

_LEVELS = f"[{', '.join(map(str, QUANTILES))}]"

BIAS = f"""
WITH measured AS (
    SELECT unnest(['length', 'prompt_length', 'difficulty']) AS measure,
           unnest([tokens::DOUBLE, prompt_length, difficulty]) AS value, fate, finished FROM fates
), found AS (
    SELECT measure, quantile_cont(value, {_LEVELS}) AS admitted,
           quantile_cont(value, {_LEVELS}) FILTER (finished) AS finished,
           quantile_cont(value, {_LEVELS}) FILTER (fate = 'trained') AS trained,
           quantile_cont(value, {_LEVELS}) FILTER (fate = 'dropped') AS dropped,
           quantile_cont(value, {_LEVELS}) FILTER (fate = 'filtered') AS filtered
    FROM measured WHERE value IS NOT NULL GROUP BY measure
)
SELECT measure, unnest({_LEVELS})::DOUBLE AS quantile, unnest(admitted) AS admitted,
       unnest(finished) AS finished, unnest(trained) AS trained, unnest(dropped) AS dropped,
       unnest(filtered) AS filtered
FROM found ORDER BY ALL
"""

# Of n answers c are right: 1 − C(n − c, k) / C(n, k), as the product of 1 − k/i over n − c < i ≤ n
# (Chen et al., "Evaluating Large Language Models Trained on Code", 2021, section 2.1).
PASS_AT_K = f"""
WITH graded AS (
    SELECT 'training' AS source, wave::BIGINT + 1 AS step, count(*) AS n,
           count(*) FILTER (reward >= 1) AS c
    FROM fates WHERE finished AND reward IS NOT NULL AND fate != 'open'
    GROUP BY wave, "group"
    UNION ALL
    SELECT 'held_out', step, prompt[2]::BIGINT, prompt[1]::BIGINT
    FROM (SELECT step, unnest(by_prompt) AS prompt FROM evaluations)
), estimated AS (
    SELECT source, step, k, coalesce(1 - list_product(
        list_transform(range(n - c + 1, n + 1), lambda i: 1 - k / i::DOUBLE)), 0) AS one
    FROM graded, (SELECT unnest({list(K_OF_PASS)})::BIGINT AS k) WHERE k <= n
)
SELECT source, step, k, count(*) AS prompts, avg(one) AS estimate,
       stddev_samp(one) / sqrt(count(*)) AS error
FROM estimated GROUP BY source, step, k ORDER BY ALL
"""
