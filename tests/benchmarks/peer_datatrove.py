"""The whole MinHash dedup of datatrove as its documentation has it, on one JSON-lines file, in one process.

Run by bench_dedup.py with the Python of datatrove's own environment: INPUT_FOLDER OUTPUT_FOLDER WORK_FOLDER.
Prints one JSON object: the seconds of each stage.
"""

import json
import sys
import time
from pathlib import Path


def main(input_folder: str, output_folder: str, work_folder: str) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers.jsonl import JsonlWriter
    from datatrove.utils.typeshelper import Languages

    work = Path(work_folder)
    config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8, seed=1)
    signatures, buckets, removals = (str(work / name) for name in ("signatures", "buckets", "removals"))
    reader = JsonlReader(input_folder)
    stages = {
        "signatures": (1, [reader, MinhashDedupSignature(signatures, config=config, language=Languages.english)]),
        "buckets": (14, [MinhashDedupBuckets(signatures, buckets, config=config)]),
        "clusters": (1, [MinhashDedupCluster(buckets, removals, config=config)]),
        "filter": (1, [reader, MinhashDedupFilter(removals), JsonlWriter(output_folder, compression=None)]),
    }
    seconds: dict[str, float] = {}
    for name, (tasks, pipeline) in stages.items():
        began = time.perf_counter()
        LocalPipelineExecutor(pipeline=pipeline, tasks=tasks, workers=1, logging_dir=str(work / f"logs-{name}")).run()
        seconds[name] = time.perf_counter() - began
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
