"""datatrove's filters in FineWeb's order on JSON lines, in one process.

Run by bench_filters.py with the Python of datatrove's own environment: published|open INPUT_FOLDER OUTPUT_FOLDER WORK_FOLDER.
`open`: thresholds that let everything through, so that every filter sees every document. Prints one JSON object: seconds.
"""

import json
import sys
import time
from pathlib import Path


def main(mode: str, input_folder: str, output_folder: str, work_folder: str) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.filters import C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
    from datatrove.pipeline.formatters import PIIFormatter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers.jsonl import JsonlWriter

    published = [
        GopherRepetitionFilter(),
        GopherQualityFilter(),
        C4QualityFilter(filter_no_terminal_punct=False),
        FineWebQualityFilter(),
    ]
    open_ = [
        GopherRepetitionFilter(
            dup_line_frac=1.0,
            dup_para_frac=1.0,
            dup_line_char_frac=1.0,
            dup_para_char_frac=1.0,
            top_n_grams=tuple((n, 1.0) for n in (2, 3, 4)),
            dup_n_grams=tuple((n, 1.0) for n in range(5, 11)),
        ),
        GopherQualityFilter(
            min_doc_words=1,
            max_doc_words=10**9,
            min_avg_word_length=1,
            max_avg_word_length=1000,
            max_symbol_word_ratio=1000.0,
            max_bullet_lines_ratio=1.0,
            max_ellipsis_lines_ratio=1.0,
            max_non_alpha_words_ratio=0.001,
            min_stop_words=0,
        ),
        C4QualityFilter(filter_no_terminal_punct=False, filter_lorem_ipsum=False, filter_curly_bracket=False, min_num_sentences=1),
        FineWebQualityFilter(line_punct_thr=0.0, short_line_thr=1.0, char_duplicates_ratio=1.0, new_line_ratio=1000.0),
    ]
    filters = published if mode == "published" else open_
    pipeline = [JsonlReader(input_folder), *filters, PIIFormatter(), JsonlWriter(output_folder, compression=None)]
    began = time.perf_counter()
    LocalPipelineExecutor(pipeline=pipeline, tasks=1, workers=1, logging_dir=str(Path(work_folder) / "logs")).run()
    print(json.dumps({"filter": time.perf_counter() - began}))


if __name__ == "__main__":
    main(*sys.argv[1:])
