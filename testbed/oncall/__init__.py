"""What tests and benchmarks of being on call share: a healthy run in a real log (`planted_run`,
made of `records`), a fault for each concern (`faults`), such runs observed and scraped by a
Prometheus (`watched_run`), Prometheus' rules (`alert_rules`) and the dashboards' queries
(`dashboards`).
"""
