from agentrl.base.parts import Part

HERE = "agentrl.data_files.readers"

PART = Part(
    name="data files",
    summary="Tasks and data sets from parquet, CSV and JSON files and from Hugging Face's hub.",
    row_files={
        ".csv": f"{HERE}:read_csv",
        ".json": f"{HERE}:read_json",
        ".parquet": f"{HERE}:read_parquet",
        "hf": f"{HERE}:read_hub",
    },
)
