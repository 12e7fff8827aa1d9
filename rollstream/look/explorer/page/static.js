// Answers the API's requests from the files of an export (`rollstream explore --export DIR`), with
// ranges of Parquet read in the browser: the page works from any file host. Prepared answers are
// looked up by their key; searches run over the table of all trajectories.

import { ApiError } from "./api.js";
import { matches, ordered } from "./filters.js";
import { asyncBufferFromUrl, cachedAsyncBuffer, decompressZstd, parquetMetadataAsync, parquetReadObjects } from "./vendor/parquet.js";

const LIMIT = 50, LIMIT_MAX = 200;
const compressors = { ZSTD: (bytes) => decompressZstd(bytes) };
const opened = new Map(); // file → promise of { file, metadata }

/** Returns the answer of a canonical key. Raises `ApiError` 404 for what was not exported. */
export async function answer(key) {
  const [path, query = ""] = key.split("?");
  const [, run, what] = path.split("/");
  if (what === "search") return search(decodeURIComponent(run), new URLSearchParams(query));
  const body = await lookUp(key);
  if (body === null) throw new ApiError(404, "This is not part of the export.");
  return JSON.parse(body);
}

let exported; // promise of the export's table of contents

function contents() {
  exported ??= fetch("data/static.json").then((response) => {
    if (!response.ok) throw new ApiError(response.status, "The export's data/static.json is missing.");
    return response.json();
  });
  return exported;
}

/** Opens a Parquet file once: its footer is read, the rest by ranges when it is needed. */
async function open(name) {
  if (!opened.has(name)) {
    opened.set(name, (async () => {
      const file = cachedAsyncBuffer(await asyncBufferFromUrl({ url: `data/${name}` }));
      return { file, metadata: await parquetMetadataAsync(file) };
    })());
  }
  return opened.get(name);
}

/** The body under a key: only the row group whose statistics enclose the key is read. */
async function lookUp(key) {
  const { file, metadata } = await open((await contents()).runs);
  let start = 0;
  for (const group of metadata.row_groups) {
    const rows = Number(group.num_rows);
    const { statistics } = group.columns[0].meta_data;
    const low = statistics?.min_value ?? statistics?.min, high = statistics?.max_value ?? statistics?.max;
    if (low === undefined || (asText(low) <= key && key <= asText(high))) {
      const found = await rowWith(file, metadata, start, start + rows, key);
      if (found !== null) return found;
    }
    start += rows;
  }
  return null;
}

function asText(value) {
  return typeof value === "string" ? value : new TextDecoder().decode(value);
}

async function rowWith(file, metadata, rowStart, rowEnd, key) {
  const keys = await parquetReadObjects({ file, metadata, compressors, rowStart, rowEnd,
    columns: ["key"] });
  const at = keys.findIndex((row) => row.key === key);
  if (at < 0) return null;
  const [row] = await parquetReadObjects({ file, metadata, compressors, rowStart: rowStart + at,
    rowEnd: rowStart + at + 1, columns: ["body"] });
  return row.body;
}

const TEXTS = ["prompt", "answer"];

/** What `api/r/{n}/search` answers, over the exported table; the texts are read only for a text. */
async function search(run, query) {
  const begun = performance.now();
  const name = (await contents()).trajectories[run];
  if (!name) throw new ApiError(404, "This run's trajectories are not part of the export.");
  const { file, metadata } = await open(name);
  const all = metadata.schema.slice(1).filter((s) => s.num_children === undefined
    || s.num_children === 0).map((s) => s.name);
  const wanted = query.get("q") ? all : all.filter((column) => !TEXTS.includes(column));
  const rows = (await parquetReadObjects({ file, metadata, compressors,
    columns: wanted })).map(plain);
  const found = ordered(rows.map((row) => matches(row, query)).filter(Boolean), query.get("order"));
  const from = Number(query.get("cursor") ?? 0);
  const limit = Math.min(LIMIT_MAX, Number(query.get("limit") ?? LIMIT));
  return {
    rows: found.slice(from, from + limit), matched: found.length, scanned: rows.length,
      total: rows.length,
    next: from + limit < found.length ? String(from + limit) : null, complete: true,
    seconds: (performance.now() - begun) / 1000, index: { trajectories: rows.length,
      total: rows.length, complete: true },
  };
}

/** Parquet's 64-bit integers as numbers. */
function plain(row) {
  return Object.fromEntries(Object.entries(row).map(([name, value]) => [name, typeof value === "bigint" ? Number(value) : value]));
}
