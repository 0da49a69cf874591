"""What datatrove's JSON-lines reader makes of each file of a folder.

Run by prove_hostile.py with the Python of datatrove's own environment: FOLDER. Prints one JSON object: for each file the texts
(their first 200 characters) and, where it stopped, the exception.
"""

import json
import sys
from pathlib import Path


def main(folder: str) -> None:
    from datatrove.pipeline.readers import JsonlReader

    found = {}
    for path in sorted(Path(folder).glob("*.jsonl*")):
        texts, raised = [], ""
        reader = JsonlReader(folder, glob_pattern=path.name)
        try:
            texts.extend(str(document.text)[:200] for document in reader.run())
        except Exception as error:
            raised = type(error).__name__
        found[path.name] = {"texts": texts, "raised": raised}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
