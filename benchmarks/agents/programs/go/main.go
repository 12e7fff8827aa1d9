// Asks two times with OpenAI's library for Go: `agent PROMPT`.
package main

import (
	"context"
	"log"
	"os"

	"github.com/openai/openai-go/v3"
)

func main() {
	client, prompt := openai.NewClient(), os.Args[1]
	params := openai.ChatCompletionNewParams{
		Model:     "policy",
		MaxTokens: openai.Int(10),
		Messages:  []openai.ChatCompletionMessageParamUnion{openai.UserMessage(prompt)},
	}
	for turn := 0; turn < 2; turn++ {
		answer, err := client.Chat.Completions.New(context.Background(), params)
		if err != nil {
			log.Fatal(err)
		}
		said := answer.Choices[0].Message.ToParam()
		params.Messages = append(params.Messages, said, openai.UserMessage(prompt))
	}
}
