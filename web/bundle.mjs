// Joins the modules of src/ into the one file that pages hold: node web/bundle.mjs [--check]
//
// The modules import one another by name from "./file.js" and export functions, classes and constants as they declare
// them, and no two of them have a name at their top in common. So they can stand one after another, those that are
// imported first, in one function: no bundler is needed, and the result reads like its sources.
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const HERE = dirname(fileURLToPath(import.meta.url));
const OUT = join(HERE, "../src/dla/inspect/assets/page.js");
const IMPORT = /^import \{[^}]*\} from "\.\/([\w-]+\.js)";\n/gm;

export function bundle(entry = "main.js") {
  const texts = new Map();
  const owners = new Map();
  const visit = (name, path) => {
    if (path.includes(name)) throw new Error(`modules import one another in a circle: ${[...path, name].join(" > ")}`);
    if (texts.has(name)) return;
    const text = readFileSync(join(HERE, "src", name), "utf8");
    for (const [, imported] of text.matchAll(IMPORT)) visit(imported, [...path, name]);
    const plain = text.replace(IMPORT, "").replace(/^export (?=(async )?(function|class|const|let) )/gm, "");
    const left = plain.match(/^(import|export)\b.*/m);
    if (left) throw new Error(`${name}: a form that cannot be joined: ${left[0]}`);
    for (const [, , , top] of plain.matchAll(/^(async )?(function\*?|class|const|let) (\w+)/gm)) {
      if (owners.has(top)) throw new Error(`${top} is declared in ${owners.get(top)} and in ${name}`);
      owners.set(top, name);
    }
    if (/<\/script|<!--/i.test(plain)) throw new Error(`${name}: a script in a page cannot say </script or <!--`);
    texts.set(name, `// ${name}\n\n${plain.trim()}\n`);
  };
  visit(entry, []);
  const head = "// Made of web/src by web/bundle.mjs: change it there.\n";
  return `${head}(() => {\n"use strict";\n\n${[...texts.values()].join("\n")}})();\n`;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const made = bundle();
  if (process.argv.includes("--check")) {
    if (readFileSync(OUT, "utf8") !== made) {
      console.error(`${OUT} is not what web/src makes: run node web/bundle.mjs`);
      process.exit(1);
    }
  } else {
    writeFileSync(OUT, made);
  }
}
