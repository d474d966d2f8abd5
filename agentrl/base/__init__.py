"""What everything stands on: processes, threads, files, locks, digests, loading, access, OTLP."""
