"""Batch jobs: files of requests that run as bulk work, for OpenAI's Batch API and for `weir batch run`. Here are their settings."""

from dataclasses import dataclass

from weir.config import AT_LEAST_ONE, POSITIVE, Checked, setting


@dataclass(frozen=True)
class JobSettings(Checked):
    """The settings of batch jobs: where they are kept, and their limits. Sizes are in bytes, durations in seconds."""

    batch_dir: str | None = setting(
        None, "directory of batch jobs and their files (default: no batch jobs)", metavar="DIR"
    )
    batch_max_bytes: int = setting(
        10 << 30, "largest total size of the files and results of batch jobs, in bytes", rule=AT_LEAST_ONE
    )
    batch_max_file_size: int = setting(200 << 20, "largest uploaded file, in bytes", rule=AT_LEAST_ONE)
    batch_max_files: int = setting(
        10_000, "maximum number of files, including those that jobs will write", rule=AT_LEAST_ONE
    )
    batch_max_jobs: int = setting(
        1000, "maximum number of batch jobs; a new one replaces the oldest finished one", rule=AT_LEAST_ONE
    )
    batch_max_requests: int = setting(50_000, "maximum number of requests in one batch job", rule=AT_LEAST_ONE)
    batch_concurrency: int = setting(128, "maximum number of batch-job requests that run at once", rule=AT_LEAST_ONE)
    batch_expire_after: float = setting(
        30 * 86400.0, "seconds after which files and finished jobs are removed", rule=POSITIVE
    )
